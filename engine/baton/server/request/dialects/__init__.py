"""Checks of request bodies, a module for each form.

chat         chat completions; responses and messages too, once they are translated
completion   completions
generate     SGLang's native API
tokens       /tokenize and /detokenize
parts        readers that all of them use
"""
