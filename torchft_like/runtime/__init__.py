"""What a trainer's process has once: its event loop, its addresses, its connections and descriptors.

Everything else here may import it. It imports the lighthouse's addresses, errors and forks, and no torch.
"""
