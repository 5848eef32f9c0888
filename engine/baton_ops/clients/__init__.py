"""Clients of routers, engines and Kubernetes, for all commands.

http_client   HTTP to routers and engines, Prometheus text
flags         values of flags that several commands share
kubectl       kubectl as a program
"""
