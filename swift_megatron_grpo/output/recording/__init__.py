"""Recorded rollouts: a run dumps its rollouts to a folder, and another run replays them instead of generating.

folder.py        the folder: file names, its writer, settings.json, the checks of --rollout_dump and --rollout_replay
rows.py          one completion with its rewards as one line of JSON with a checksum, and back; checks of its values
reading.py       reads rollouts of another run (--rollout_replay), and of an earlier one in the same folder (--resume)
unfinished.py    the rollout that a checkpoint interrupts between two of its steps, and the logs beyond the checkpoint

The format is described in docs/dump_and_replay.md. Tests: tests/unit/output/recording.
"""
