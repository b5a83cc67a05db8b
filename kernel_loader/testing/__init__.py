"""A Hugging Face Hub on the loopback interface, for the real `huggingface_hub` client; standard library only.

repository     content as commits, branches, tags        blob     one file's hashes
site           what the Hub knows and answers            routes   what a URL names
server         sockets, threads, answers on the wire     answer   status, headers, body
faults         what goes wrong, on demand                log      what was asked
hub            all of it together
"""

from .answer import Answer
from .faults import Fault, Injection
from .hub import Hub
from .log import Request, RequestLog
from .repository import Commit, Repository

__all__ = ["Answer", "Commit", "Fault", "Hub", "Injection", "Repository", "Request", "RequestLog"]
