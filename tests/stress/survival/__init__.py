"""Real servers and a real trainer that are put through what a long run meets: kill_servers.py and soak.py."""
