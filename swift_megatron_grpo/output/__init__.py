"""The files and lines that a run writes: all of --output_dir.

checkpoints/  the newest complete checkpoint, manifests, free space for a save
recording/    rollouts on disk: dump, replay, and the files of an interrupted run
console/      the lines that a run prints
report/       one HTML file per run, or of several; standard library only
disk/         files that are complete or absent, checksums, locks, errors of a full disk
"""
