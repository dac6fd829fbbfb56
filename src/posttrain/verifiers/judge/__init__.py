"""A language model as the judge: who writes, what is asked, how the answer is read, and what it may teach."""
