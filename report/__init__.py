"""Report on a run, and predict the next one. Reads only files: no ssh, no torch.

Read it in this order:
1. read.py reads the files of a run; boundary/run_files.py and files.py define which are accepted.
2. accounting.py adds up the seconds, measure.py the mean step, progress.py the course of a run.
   figures.py is the table of a machine's figures, and usage.py sums them up.
3. wait_rules.py and bottleneck.py find the cause, verdict.py explains it, and advice.py predicts
   remedies with formulas.py, as plan.py and predict.py do for the next run.
4. analysis.py puts all of a run together, and run_view.py makes a view of it (view.py). text.py
   prints the view, and page.py draws it. status.py is about a running run, compare.py about some.
"""
