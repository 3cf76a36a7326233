"""The library behind the programs.

    cli         settings, errors, files, devices, the terminal
    data        texts, their formats, tokenizers
    run         everything around the steps of a run: checkpoints, optimizers, ranks, the log
    infill      gaps, the search for their fills, log-probabilities

and products, each of which can be deleted while the rest works:

    constrain   gaps that must match a regular expression
    proofread   corrections of a text
    networks    pretrained networks
    export      the contents of an exported model
    serving     the server
    web         pages
"""
