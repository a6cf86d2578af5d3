"""What was computed once and is still known: KV blocks in a tree over tokens, states at exact positions on its nodes.

nodes.py        nodes, snapshots, a request's way through them, and what it finds
tree.py         the tree over them. Tokens and page numbers, no tensor
publishing.py   what a request has to offer after a step (a pure rule)
eviction.py     what is given up first (a pure rule)
leaders.py      whom to wait for, where to stop for those who wait (pure rules)
kept.py         the owner of the kept pages: takes blocks and states in, gives up what is worth least
spilling.py     to a second tier and back
cache.py        the door: looks up, resumes, publishes; nothing false is kept or gone on from
observer.py, tier.py   the doors for the audit and for a second tier
"""
