"""`python -m monoflow.cli`."""

from .app import main

main()
