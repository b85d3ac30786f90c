"""Pieces for any training script: gradient sums over slow links (`tandem.sync`), and timings that
`python -m report` reads (`tandem.timings`). docs/own-script.md."""
