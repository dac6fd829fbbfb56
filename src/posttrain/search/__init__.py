"""Search: trees over tactics of a proof, steps of an answer, or turns of an environment.

protocol.py         states, moves, and the questions that a search asks
tree.py             the result of a search: nodes, moves, costs, the path to the end
strategies/         best_first, beam and best_of_n; puct and rmax; hypertree
moves/              where moves lead: steps of an answer, turns of an environment
values.py           values of states by the policy or a reward model, and what the policy learns from a tree
driver.py           many searches at once over one engine, without a barrier
engine_requests.py  questions as requests to an engine
training_rows.py    training data from a tree
record.py           a search as plain data
choice.py           the table [search] of a recipe
"""
