"""What a run did and what the next one will do. Reads files only: no ssh, no torch.

Reading order: records (files) -> accounting (seconds) -> measure (one step) -> verdict, advice
-> analysis, which text and page render. The formulas of all predictions are in formulas.
"""
