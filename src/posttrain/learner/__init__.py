"""The learner: it turns a method's losses into new weights."""
