"""What Baton promises, each promise a script of its own that shows it: docs/guarantees.md has what they printed.

    python -m tests.fault.promises.slow_decode [--short]

| script | promise |
|---|---|
| slow_decode | a slow D whose lease has run out gives no wrong token |
| abort_storm | clients that leave give no wrong token to those who stay, while pages are reused |
| kill_matrix | kill -9 of any process in any state of a room: one answer each, nothing held |
| aborted_requests | after 100,000 aborted requests nothing is held |
| damaged_pair | a pair that damages pages is named and left out; the others notice nothing |
| bad_group | one bad group of twelve does not take the others down |
| late_grants | what D holds while P computes |
| pull_break_even | from which length on a pull is cheaper than to compute |
| feature_pairs | which features work together, and which are refused |

`show` is what they print with, `test_promises` runs all of them: the short forms in `make test`, the long ones in
`make test-all`.
"""
