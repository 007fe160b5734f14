"""Files that survive a crash, checksums that detect damage, and errors that name a full disk.

checksums.py   CRC-32 of bytes and of whole files, in threads
durable.py     write a file so that it is complete on disk or does not exist
full_disk.py   recognise a full disk behind any error, and name it
folder_lock.py lock the folders that a run writes, so that no second run writes there

Shared by recording/, checkpoints/, weights/, arguments/ and trainer.py. Tests: tests/unit/output/disk.
"""
