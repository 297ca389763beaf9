"""What users see of a checkout, as text to compare: before and after a change that must change nothing.

    python -m tests.golden             compare with the transcripts beside this file, and print what differs
    python -m tests.golden --write     write them anew
    python -m tests.golden.bits        losses and weights of many small runs, to the last bit (see its --help)

All of it goes through the doors that users have (pretrain_gpt.py, megalite, `import megalite`), so that it can look at
any checkout, whatever its modules are called: --checkout DIR.
"""
