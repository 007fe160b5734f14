"""Files that survive a crash, checksums that detect damage, and errors that name a full disk.

files.py       write a file so that it is complete on disk or does not exist; CRC-32 of bytes and files
full_disk.py   recognise a full disk behind any error, and name it
folder_lock.py lock the folders that a run writes, so that no second run writes there
"""
