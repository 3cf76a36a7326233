"""What the programs share: how they start and end, settings, files, devices, the terminal."""
