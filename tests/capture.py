"""Write everything that arrives at or leaves the interfaces of a namespace to a file: python capture.py FILE."""

import socket
import sys

ETH_P_ALL = 3
BUFFER_BYTES = 64 << 20


def main(path: str) -> None:
    with (
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) as heard,
        open(path, "wb", 0) as file,
    ):
        heard.setsockopt(socket.SOL_SOCKET, 33, BUFFER_BYTES)  # SO_RCVBUFFORCE
        print("ready", flush=True)
        while True:
            file.write(heard.recv(1 << 17))


if __name__ == "__main__":
    main(sys.argv[1])
