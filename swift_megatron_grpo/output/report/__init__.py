"""The report of a run: one offline HTML file, from the files of the run's folder. Standard library only.

    run_files.py   reads logging.jsonl and args.json of a run's folder
    completions.py reads completions.jsonl: its first and newest rollouts, within a limit
    histograms.py  histograms of rewards and lengths, at the beginning and now
    simulated_drafts.py  reads the steps that drafts would have saved, if the run's folder has them
    contents.py    what the page shows of one run or several, as JSON
    page.py        the HTML file, from that JSON and assets/; written again while the run lasts
    assets/        HTML, CSS and JavaScript of the page

Tests: tests/unit/output/report; test_browser.py opens the page in a headless browser.
"""
