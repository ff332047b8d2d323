"""What runs under ``torchrun``: see ``tests/test_distributed.py``."""
