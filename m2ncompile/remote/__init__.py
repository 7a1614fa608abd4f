"""A store by URL, laid out as the local one and shared by machines.

Importing this imports no protocol's library; the first call to a remote does.
"""

from m2ncompile.remote.address import Address, default_url, parse
from m2ncompile.remote.remote import Remote, open_remote, time_limit

__all__ = ["Address", "Remote", "default_url", "open_remote", "parse", "time_limit"]
