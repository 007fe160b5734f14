"""Images as files, for the trainer that reads them and for servers that receive them.

files.py  the images of a row as bytes, their digests, and limits on what a client may send

Tested by tests/unit/data/test_media.py and tests/unit/server/test_media.py.
"""
