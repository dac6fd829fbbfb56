"""Play episodes in the loop's thread, in another thread, in other processes or on a Ray cluster.

A `Sampler` is what the loop talks to. It has one or more workers; a `RolloutWorker` is one engine with one
`EpisodeRunner`.

protocol.py       GroupRequest (in), FinishedGroup (out), and the Sampler interface
worker.py         RolloutWorker: starts groups and loads weights between two steps of its engine
episode_runner.py EpisodeRunner: the interface of what plays groups on an engine; three implementations:
rollouts.py         a verifier or an environment
search_runner.py    a tree search for each task
agents.py           programs that call the policy over HTTP
live_episode.py   RunningEpisode, and PartialEpisode: the form in which one is saved
episodes.py       the HTTP endpoints of agents' episodes
conversations.py  which conversation of an agent's episode a request continues
snapshots.py      published weights: where they are stored, and the proof that they arrived
local.py          LocalSampler: a worker in the loop's own thread
pool.py           SamplerPool: workers behind channels, restarted when they die
remote.py         channels to a worker in a thread or in a process
ray.py            channel to a worker in a Ray actor, and weights in Ray's object store
cluster.py        joining a Ray cluster, or starting one
"""
