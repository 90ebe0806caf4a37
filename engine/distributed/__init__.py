"""Several ranks, hosts and replicas: processes, rendezvous, step transport, encrypted sockets between hosts, Ray.
No torch.
"""
