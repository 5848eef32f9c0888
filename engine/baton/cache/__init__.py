"""KV page bookkeeping: free pages, the tokens of each page, and its users. Pure: standard library
only.

pages.py   PageAllocator: page ids 0..n-1, all or nothing
radix.py   RadixCache: token prefix → pages, lock counts, eviction
eviction.py  which unlocked leaf goes first
kv_events.py  the tree's content as a log of events, for routers
ledger.py  PageLedger: free + cached + held + in_transfer == capacity
"""
