"""python -m posttrain: the same as the command posttrain."""

from posttrain.cli import main

main()
