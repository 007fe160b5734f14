"""Recorded rollouts: a run dumps its rollouts to a folder, and another run replays them instead of generating.

folder.py        the folder: file names, settings.json, and the checks of --rollout_dump and --rollout_replay
rows.py          one completion with its rewards as one line of JSON with a checksum, and back
values.py        the values of a recorded completion: types, lengths, vocabulary
dump.py          writes rollouts (--rollout_dump)
replay.py        reads rollouts (--rollout_replay)
earlier.py       reads what an earlier run has dumped beyond the checkpoint (--resume)
unfinished.py    the rollout that a checkpoint interrupts between two of its steps
resumed_logs.py  trims logging.jsonl and completions.jsonl of a run that resumes

The format is described in docs/dump_and_replay.md. Tests: tests/unit/output/recording.
"""
