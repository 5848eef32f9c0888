"""Clients of routers, engines and Kubernetes, for all commands.

http_client   HTTP to routers and engines
flags         values of flags that several commands share
metrics       pages in Prometheus' text format
kubectl       kubectl as a program
"""
