/* A stand-in for an NFS share, preloaded into every process of a node: what is opened below
 * /srv/share takes as long as /srv/share.delay says (microseconds) and is counted in
 * /srv/share.count (bytes), and the kernel's two files about mounts are those of /srv/proc, which
 * the test writes by that count. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARE "/srv/share/"

static int (*real)(int, const char *, int, ...);

static void wait_for_the_share(int file)
{
    char text[32] = "";
    struct stat state;
    int delay = real(AT_FDCWD, "/srv/share.delay", O_RDONLY);
    if (delay >= 0) {
        if (read(delay, text, sizeof text - 1) > 0)
            usleep(atoi(text));
        close(delay);
    }
    int count = real(AT_FDCWD, "/srv/share.count", O_WRONLY | O_APPEND);
    if (count >= 0 && fstat(file, &state) == 0 && S_ISREG(state.st_mode)) {
        int length = snprintf(text, sizeof text, "%ld\n", (long)state.st_size);
        if (write(count, text, length) < 0)
            usleep(0);
    }
    if (count >= 0)
        close(count);
}

static int opened(int folder, const char *path, int flags, mode_t mode)
{
    if (!real)
        real = dlsym(RTLD_NEXT, "openat");
    if (!strcmp(path, "/proc/self/mounts"))
        path = "/srv/proc/mounts";
    if (!strcmp(path, "/proc/self/mountstats"))
        path = "/srv/proc/mountstats";
    int file = real(folder, path, flags, mode);
    if (file >= 0 && !strncmp(path, SHARE, sizeof SHARE - 1) && !(flags & O_DIRECTORY))
        wait_for_the_share(file);
    return file;
}

#define MODE(flags, mode)                                   \
    mode_t mode = 0;                                        \
    if (flags & (O_CREAT | O_TMPFILE)) {                    \
        va_list words;                                      \
        va_start(words, flags);                             \
        mode = va_arg(words, mode_t);                       \
        va_end(words);                                      \
    }

int open(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags, mode) return opened(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE(flags, mode) return opened(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE(flags, mode) return opened(folder, path, flags, mode); }
