"""What a reward overpays, before a policy finds it.

tricks     answers that know nothing of what a task asks
policy     a table of probabilities that learns, from the reward alone, which fixed text is paid
measure    what each trick, the policy's text and the best of n given answers earn
run        posttrain attack, after its words are read
"""
