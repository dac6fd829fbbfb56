"""Stages that each name a recipe and take what earlier ones made, run as one command.

file      the TOML file: stages, and what of earlier stages each takes
away      functions of the user, which are called in processes of their own
record    the pipeline's directory: what each stage was asked, what it made, how far it is
check     everything that can be checked before the first stage trains
stages    one stage of each kind, run to its end
command   posttrain train
"""
