"""The commands of the command line: a file each, or for a few that share code."""
