"""Deadlines: a run that hangs ends with an error that names the phase or the reward function.

watchdog.py     the rank's side: starts the monitor and sends it the current deadlines
monitor.py      a process for each rank: past a deadline it writes a report and kills the rank
interrupt.py    interrupts Python code in the main thread after a timeout
"""
