"""What is said of models, answers and runs."""
