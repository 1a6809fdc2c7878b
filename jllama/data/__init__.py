"""From a corpus to batches.

``corpus`` reads documents from files, ``chats`` reads conversations, ``tokens`` writes token ids to
disk, ``datasets`` holds them and ``batches`` makes rows of them.
"""
