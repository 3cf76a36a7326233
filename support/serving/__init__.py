"""serve.py's parts: requests of clients, who computes them when, HTTP and its limits, numbers."""
