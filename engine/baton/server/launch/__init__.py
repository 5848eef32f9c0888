"""Start of an engine (`engine`), and child processes that end with their parent
(`process_group`).
"""
