"""Run stages as one command; each names a recipe, and uses the outputs of earlier ones.

file           the TOML file: stages, and their references to earlier ones
user_function  call a user's function in a process of its own
record         the pipeline's directory: recipes, outputs and progress of the stages
check          check everything that can be checked before the first stage trains
kinds          the stages that make a model or data
stages         run the stages to their end, then compare
command        posttrain train
"""
