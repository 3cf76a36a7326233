"""What bench.py measures: the operations of kernels/ and their rivals, and texts."""
