"""CUDA fat binaries inside an extension module: find them, and let each hold fewer images.

An extension module carries its device code in the ELF section `.nv_fatbin`, as containers of images: one for every GPU
architecture (machine code), and often PTX, which the driver compiles where no machine code fits. The driver takes what
fits the GPU and ignores the rest. Containers are rewritten in place: what is left over is filled with zeros, which
compress to nothing, so that the host code, every offset and the size of the file stay as they are.

NVIDIA does not document the format. What is assumed of it is checked while reading: entries must fill their container.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

_MAGIC = 0xBA55ED50
#: u32 magic, u16 version, u16 size of this header, u64 bytes of the images.
_CONTAINER = struct.Struct("<IHHQ")
#: u16 kind, u16 version, u32 header size, u64 payload size, u32 compressed size, u32, u16 minor, u16 major, u32
#: architecture, u32, u32, u64 flags, u64, u64 size when decompressed.
_IMAGE = struct.Struct("<HHIQIIHHIIIQQQ")
_PTX, _MACHINE_CODE = 1, 2
_LZ4, _ZSTD = 0x2000, 0x8000


@dataclass(frozen=True)
class Image:
    """Device code for one architecture.

    architecture: compute capability, 90 for 9.0.
    header: as in the file.
    payload: machine code or PTX, perhaps compressed, padded to 8 bytes.
    """

    is_ptx: bool
    architecture: int
    header: bytes
    payload: bytes

    @property
    def zstd(self) -> bytes | None:
        """The zstd frame that the payload is, or None where it is not compressed.

        Raises:
            ValueError: it is compressed in another way.
        """
        fields = _IMAGE.unpack_from(self.header)
        if fields[11] & _LZ4:
            raise ValueError("device code compressed with lz4 cannot be read")
        return self.payload[: fields[4]] if fields[11] & _ZSTD else None

    def __bytes__(self) -> bytes:
        return self.header + self.payload


@dataclass(frozen=True)
class Container:
    """Images of the same kernels.

    offset: of its header in the file.
    begin, end: of the images in the file.
    """

    offset: int
    begin: int
    end: int
    images: tuple[Image, ...]


def machine_code(code: bytes, architecture: int, like: Image) -> Image:
    """An image of uncompressed machine code whose other attributes are those of `like`, machine code as well."""
    fields = list(_IMAGE.unpack_from(like.header))
    code += bytes(-len(code) % 8)
    fields[2], fields[3], fields[4], fields[8], fields[13] = _IMAGE.size, len(code), 0, architecture, 0
    fields[11] &= ~(_LZ4 | _ZSTD)
    return Image(False, architecture, _IMAGE.pack(*fields), code)


def containers(module: bytes) -> Iterator[Container]:
    """The containers of an extension module.

    Raises:
        ValueError: not a 64-bit ELF file, or the format is another than the one known here.
    """
    for begin, size in _fatbin_sections(module):
        position = begin
        while position + _CONTAINER.size <= begin + size:
            magic, _, header_size, num_bytes = _CONTAINER.unpack_from(module, position)
            if magic != _MAGIC:
                position += 8
                continue
            first = position + header_size
            yield Container(position, first, first + num_bytes, tuple(_images(module, first, first + num_bytes)))
            position = first + num_bytes


def rewrite(module: bytes, keep: Callable[[Container], Sequence[Image]]) -> bytes:
    """The module with only those images that `keep` returns for each container.

    A container must not be empty. One of which nothing is kept gets the smallest machine code of an architecture that
    nobody keeps, and so has, as before, nothing for the GPU in question.

    Raises:
        ValueError: something to keep is larger than its container.
    """
    found = list(containers(module))
    kept = [tuple(keep(container)) for container in found]
    architectures = {image.architecture for images in kept for image in images}
    unusable = [
        bytes(image)
        for container in found
        for image in container.images
        if not image.is_ptx and image.architecture not in architectures
    ]
    rewritten = bytearray(module)
    for container, images in zip(found, kept, strict=True):
        content = b"".join(map(bytes, images)) or min(unusable, key=len, default=b"")
        size = container.end - container.begin
        if not content or len(content) > size:
            raise ValueError(f"the container at {container.offset:#x} has no room for what is to be kept of it")
        rewritten[container.begin : container.end] = content + bytes(size - len(content))
        struct.pack_into("<Q", rewritten, container.offset + 8, len(content))
    return bytes(rewritten)


def _images(module: bytes, begin: int, end: int) -> Iterator[Image]:
    position = begin
    while position + _IMAGE.size <= end:
        fields = _IMAGE.unpack_from(module, position)
        kind, header_size, payload_size, architecture = fields[0], fields[2], fields[3], fields[8]
        if kind not in (_PTX, _MACHINE_CODE):
            raise ValueError(f"device code of an unknown kind at {position:#x}")
        payload = position + header_size
        yield Image(kind == _PTX, architecture, module[position:payload], module[payload : payload + payload_size])
        position = payload + payload_size
    if position != end:
        raise ValueError(f"a fat binary at {begin:#x} is not laid out as expected")


def _fatbin_sections(module: bytes) -> Iterator[tuple[int, int]]:
    """Offset and size of the sections `.nv_fatbin` of an ELF file."""
    if module[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", module, 0x28)
    size, number, names_index = struct.unpack_from("<HHH", module, 0x3A)
    # u32 name, u32 type, u64 flags, u64 address, u64 offset, u64 size.
    sections = [struct.unpack_from("<IIQQQQ", module, table + i * size) for i in range(number)]
    names = sections[names_index][4]
    for name, _, _, _, offset, num_bytes in sections:
        start = names + name
        if module[start : module.index(b"\0", start)] == b".nv_fatbin":
            yield offset, num_bytes
