"""Search: trees over tactics of a proof, steps of an answer, or turns of an environment.

protocol.py    State, Move, Refused, the three questions that a search asks, and Steps, who answers one
tree.py        what a search has found: nodes, moves, what they cost, the way to the end
best_first.py  best_first, beam, best_of_n
puct.py        PUCT with values, and with the reward for what is new
drive.py       many searches at once over one engine, without a barrier
coq.py, lean.py, reasoning.py    where moves lead
lean_file.py   many theorems in one file of Lean, and what Lean says of each
lean_move.py   what one move of a proof in Lean may be
"""
