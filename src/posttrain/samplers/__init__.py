"""Where episodes are played: in the loop's thread, another thread, another process, or on a Ray cluster.

protocol.py       what goes in (requests for groups), what comes out (finished groups), and what a sampler is
live_episode.py   an episode that is going on
episode_runner.py what a worker asks of whoever plays groups: episodes, or searches
rollouts.py       the episodes of groups, side by side, on one engine
worker.py         one engine with its rollouts: takes groups and weights between two steps
snapshots.py      published weights: where they lie, and the proof that they arrived
local.py          a worker in the loop's own thread
remote.py         a worker behind a connection: in a thread or in a process of its own
ray.py            a worker as an actor of a Ray cluster, and weights in its object store
pool.py           several samplers as one; the groups of one that dies are played by others
"""
