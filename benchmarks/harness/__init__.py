"""What benchmarks/bench.py is made of, in the order of a run.

workload -> models -> job -> processes (with instrument/ inside each) -> results -> page, picture
"""
