"""The script that `monoflow calibrate` runs on every rank."""

from monoflow.cli.measure import main

main()
