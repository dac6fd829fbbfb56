"""The learner: from a method's losses to new weights."""
