"""Search: trees over tactics of a proof, steps of an answer, or turns of an environment.

protocol.py    State, Move, Refused, the three questions that a search asks, and Steps, who answers one
tree.py        what a search has found: nodes, moves, what they cost, the way to the end
best_first.py  best_first, beam, best_of_n
puct.py        PUCT with values, and with the reward for what is new
hypertree.py   proofs of goals that can be proved apart: AND over parts, OR over moves
values.py      values of states by the policy itself or by a reward model, and what a tree teaches of them
record.py      a search as plain data
driver.py      many searches at once over one engine, without a barrier
coq.py, lean.py, reasoning.py, turns.py    where moves lead: tactics, steps of an answer, turns
lean_file.py   many theorems in one file of Lean, and what Lean says of each
lean_move.py, coq_move.py    what one move of a proof may be
"""
