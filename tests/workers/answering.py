"""What the workers of these tests answer with."""

import os
import time


def answers():
    """Calls what a request names, with its argument."""

    def answer(request):
        name, _, argument = request.decode().partition(" ")
        return str(globals()[name](argument)).encode()

    return answer


def echo(text):
    return text


def pid(_):
    return os.getpid()


def takes(mib):
    return len(bytearray(int(mib) * 2**20))


def computes(_):
    while True:
        pass


def waits(seconds):
    time.sleep(float(seconds))


def ends(code):
    os._exit(int(code))


def prints(text):
    print(text, flush=True)
    return os.read(0, 10)


def broken():
    raise SystemExit("cannot start")
