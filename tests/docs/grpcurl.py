"""Stands in for `grpcurl` where that is not installed: the options that docs/clients.md uses, on Python's gRPC.

The test of that page puts it on the PATH under that name. It reads the protocol from the protoset file, as grpcurl
does, so that an example with a wrong field or a wrong method fails.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory


def main() -> int:
    """Call the method with the JSON message and print each answer as JSON."""
    parser = argparse.ArgumentParser(prog="grpcurl")
    parser.add_argument("-plaintext", action="store_true", required=True)
    parser.add_argument("-protoset", type=Path, required=True)
    parser.add_argument("-H", dest="headers", action="append", default=[])
    parser.add_argument("-d", dest="data", required=True)
    parser.add_argument("address")
    parser.add_argument("method")
    arguments = parser.parse_args()

    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(arguments.protoset.read_bytes()).file:
        pool.Add(file)
    service, _, name = arguments.method.partition("/")
    method = pool.FindServiceByName(service).methods_by_name[name]
    request = json_format.Parse(arguments.data, message_factory.GetMessageClass(method.input_type)())
    answer_type = message_factory.GetMessageClass(method.output_type)
    headers = [tuple(part.strip() for part in header.split(":", 1)) for header in arguments.headers]
    with grpc.insecure_channel(arguments.address) as channel:
        call = channel.stream_stream(
            f"/{arguments.method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=answer_type.FromString,
        )
        try:
            for answer in call(iter([request]), metadata=headers, timeout=60):
                print(json_format.MessageToJson(answer))
        except grpc.RpcError as error:
            print(f"ERROR: {error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
