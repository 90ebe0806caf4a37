#!/bin/sh
# The C compiler for tools/mutate.py: an object file whose preprocessed source was compiled before is taken from the
# folder $CC_CACHE. Compiler flags are not part of the key: within one run they are the same for all files.
set -eu
compiler=$(command -v cc || command -v gcc)
case " $* " in *" -c "*) ;; *) exec "$compiler" "$@" ;; esac
object= previous=
for argument; do
    [ "$previous" != -o ] || object=$argument
    previous=$argument
done
mkdir -p "$CC_CACHE"
"$compiler" "$@" -E
digest=$(sha256sum <"$object")
cached=$CC_CACHE/${digest%% *}.o
if [ ! -f "$cached" ]; then
    "$compiler" "$@"
    cp "$object" "$cached.$$"
    mv "$cached.$$" "$cached"
fi
cp "$cached" "$object"
