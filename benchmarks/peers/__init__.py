"""Other libraries at the same work, each a small program run by an environment of its own.

`python -m benchmarks.peers.NAME fill` hands the ids of public.produced to the library, `… work` runs
its worker until it is ended. They read PEER_DATABASE, PEER_BROKER and PEER_NAME, and know nothing of
towpath.
"""
