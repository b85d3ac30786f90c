/* Slow files, preloaded into every process of a machine: what is opened below /srv/share takes as
 * many microseconds as /srv/share.delay says, or that many of a processor where it says `burn`, and
 * is counted in /srv/share.count (bytes). Where /srv/proc has the kernel's two files about mounts,
 * they are read in place of its own: then it is a share. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SHARE "/srv/share/"

static int (*real)(int, const char *, int, ...);

static void spend(const char *text)
{
    struct timespec now, limit;
    if (strncmp(text, "burn ", 5)) {
        usleep(atoi(text));
        return;
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &limit);
    long until = limit.tv_sec * 1000000 + limit.tv_nsec / 1000 + atoi(text + 5);
    do
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while (now.tv_sec * 1000000 + now.tv_nsec / 1000 < until);
}

static void slow_down(int file)
{
    char text[32] = "";
    struct stat state;
    int delay = real(AT_FDCWD, "/srv/share.delay", O_RDONLY);
    if (delay >= 0) {
        if (read(delay, text, sizeof text - 1) > 0)
            spend(text);
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
    int file = -1;
    if (!strcmp(path, "/proc/self/mounts"))
        file = real(folder, "/srv/proc/mounts", flags, mode);
    if (!strcmp(path, "/proc/self/mountstats"))
        file = real(folder, "/srv/proc/mountstats", flags, mode);
    if (file < 0)
        file = real(folder, path, flags, mode);
    if (file >= 0 && !strncmp(path, SHARE, sizeof SHARE - 1) && !(flags & O_DIRECTORY))
        slow_down(file);
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
