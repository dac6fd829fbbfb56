"""Pure functions of tensors. Nothing in this folder imports anything else of posttrain."""
