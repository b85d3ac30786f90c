"""What a run did and what the next one will do. Reads files only: no ssh, no torch.

Read it in this order:
1. read.py: the files of a run (boundary/run_files.py and files.py say what is accepted).
2. Its figures: accounting.py, where each second went; measure.py, the mean step; figures.py, the
   table of a machine's figures, and usage.py, what they were in a run; progress.py.
3. What they mean: wait_rules.py and bottleneck.py, verdict.py in sentences; advice.py, what would
   be faster, by formulas.py, of which plan.py and predict.py make predictions, too.
4. What is shown: analysis.py puts all of a run together; run_view.py makes a view of it (view.py),
   which text.py prints and page.py draws. status.py is of a run that goes on, compare.py of
   several.
"""
